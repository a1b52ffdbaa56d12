"""What a front end decides about its engines: who may come in, whose choice goes to an engine next, how long a newcomer
would wait. Pure: events in, decisions out; streams, tasks and links are the shell's (server.client).

    desk      what is open, combined from the next two
    places    whose choice gets the next place
    service   what service costs, and how long a newcomer would wait
"""
