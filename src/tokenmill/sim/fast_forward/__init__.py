"""What exists only to make simulations fast: decode steps that nothing comes between are made many at a time, with
results equal to the last bit. Engine and gateway do not know of it, but for RequestQueue.pace and repeat, and what a
routing policy says of the engines that it looks at.

    steps     such steps of one engine, at a price that does not grow with its sequences
    worker    a simulated worker over them, without a task, a timer and a message for each
    deferred  what such workers have said and the front end has not yet been told
"""
