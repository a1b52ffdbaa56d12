"""What is handed to whom, in tokens: counted as it is written, kept through crashes, told by /v1/usage.

meter     calls -> entries of the journal             record   an entry's bytes, and bytes -> entries
journal   the files that a front end appends to       ledger   SQLite: entries -> sums by time
books     the thread that folds one into the other    question   what is asked
"""
