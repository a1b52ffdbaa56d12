"""The command line: reads options, wires the rooms together, and runs the result.

    main            parser and dispatch; an expected failure is exit code 2 and one line
    parser          how flags are spelled, and how a wrong one is answered
    options         flags from declared options, and back
    serve           `serve`: front end here, engine there, one link between; its flags as one frozen object
    serve_options   the options of `serve`, and what they come to
    front_end       the process that speaks HTTP
    engine_process  the process that holds the model, and what it is told
    supervisor      keeps such a process alive, and ends one that is stuck
    zygote          the front end's side of zygote_process, which loads once and forks engines
    worker          the same for a front end on another machine, started by hand
    workers         takes those in
    engines         the engines of `serve`, and what a launcher is
    local           the launcher of this machine
    chat, generate, models, doctor, bench    the other commands

The only room that may import all others. What it and `llm` share is in `node`.
"""
