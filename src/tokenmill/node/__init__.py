"""One node: what this machine offers, what was asked for, and one worker set up from both.

    machine     what this machine offers (the only reader of cgroups)
    processors  its cores, and how many threads steps of few and of many rows take
    process     which process is which, and whether one has ended
    options     what may be asked of a node, each option declared once
    resolve     options + machine + model -> settings, each with its reason (pure), and the split of the KV pool
    text        tokenizer and template as asked for; sampling.py has the settings of requests that name none
    foreign     options of other servers, and what becomes of them here
    load        an open checkpoint and settings -> a worker ready to run, which gives tokens or vectors
    model_warnings  what a user should know of a model before it answers
    memory      what this process holds, what its allocator gives back, and whether the machine runs short

Knows no flags, no HTTP and no processes: `cli` and `llm` bring what was asked for.
"""
