"""OpenAI's files and batches: calls in a file, run when nobody else wants the engine, their answers in a file.

store    the folder: files, and the records of batches
lines    a batch's lines: what they must be, and what becomes of them
batch    a batch's record and its states
runner   runs batches
calls    a call from inside the process, and whose turn it is
routes   the endpoints; uploads go straight to the folder
"""
