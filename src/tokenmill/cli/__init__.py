"""The command line: reads options and the machine, wires the rooms together, and runs the result.

    main            parser and dispatch; an expected failure is exit code 2 and one line
    options         flags and what they mean; flags of other servers that do not apply here
    machine         what this machine offers (the only reader of /proc and cgroups)
    resolve         options + machine + model -> settings, each with its reason (pure)
    engine_process  the process that holds the model
    supervisor      keeps that process alive
    wire            `serve`: front end here, engine there, one link between
    chat, generate, models, doctor, bench    the other commands

The only room that may import all others, and the only one that does.
"""
