"""Programs that run other engines for a comparison, each in an interpreter that has the engine.

They import nothing of tokenmill and reach one another by file name, because that interpreter knows no such package.
"""
