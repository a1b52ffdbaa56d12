"""What is handed to whom, in tokens: counted as it is written, kept through crashes, told by /v1/usage.

meter        calls -> entries of the journal         journal    the files that a front end appends to
accounting   the thread that folds them into sums    ledger     SQLite: entries -> sums by time
question     what is asked of the sums
"""
