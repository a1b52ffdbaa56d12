"""One node: what this machine offers, what was asked for, and one worker set up from both.

    machine     what this machine offers (the only reader of /proc and cgroups)
    options     what may be asked of a node, each option declared once
    resolve     options + machine + model -> settings, each with its reason (pure); pools.py splits the KV pool
    pooling     whether a model gives tokens or vectors, and how vectors are pooled
    text        tokenizer and template as asked for; sampling.py has the settings of requests that name none
    foreign     options of other servers, and what becomes of them here
    load        an open checkpoint and settings -> a worker ready to run
    notes       what a user should know of a model before it answers
    heap        how the allocator of this process keeps its memory

Knows no flags, no HTTP and no processes: `cli` and `llm` bring what was asked for.
"""
