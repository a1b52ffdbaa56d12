"""What a front end decides about its engines: who may come in, whose choice goes to which engine next, how long a
newcomer would wait, and what becomes of requests whose engine has died. Pure: events in, decisions out; streams, tasks
and links are the shell's (server.client).

    gateway   who has which request           events    what happens to it, and what it wants done
    entry     one request in its books        suspects  requests of which engines may have died
    totals    engines' states as one
    desk      what is open, combined from the next two
    places    whose choice gets the next place
    service   what service costs, and how long a newcomer would wait
    admission  who may enter now
"""
