"""Calls that may be sent again: a call with an Idempotency-Key is carried out once, and repeats get its answer.

layer   which call runs, which waits, which is answered from the store
store   the answers as they are sent, for a day
"""
