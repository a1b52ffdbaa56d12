"""The command line: reads options, wires the rooms together, and runs the result.

    main            parser and dispatch; an expected failure is exit code 2 and one line
    parser          how flags are spelled, and how a wrong one is answered
    options         flags from declared options, and back
    serve_options   the options of `serve`, and what they come to
    engine_process  the process that holds the model
    keeper_process  loads once, and forks such processes; keeper: the front end's side of it
    lives           one life of such a process, as who started it sees it
    supervisor      keeps that process alive
    worker          the same for a front end on another machine, started by hand
    workers         takes those in
    engines         the engines of `serve`, and what a launcher is
    local           the launcher of this machine
    wire            `serve`: front end here, engine there, one link between
    chat, generate, models, doctor, bench    the other commands

The only room that may import all others. What it and `llm` share is in `node`.
"""
