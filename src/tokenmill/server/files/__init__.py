"""OpenAI's files and batches: calls in a file, run when nobody else wants the engine, their answers in a file.

store    the folder: files, and the records of batches
upload   multipart bodies, straight to the folder
lines    a batch's lines: what they must be, and what becomes of them
batch    a batch's record and its states
runner   runs batches
routes   the endpoints
"""
