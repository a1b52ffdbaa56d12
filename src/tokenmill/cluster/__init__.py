"""What a front end decides about its engines: which choice goes to which engine next, how long a new call would wait,
which engines may join, and what happens to requests whose engine has died. Pure: events in, decisions out. Streams,
tasks and links belong to the shell (server.client).

    gateway   which engine has which request  events    what happens to the gateway, and what it wants done
    entry     one request in its record       links     one engine in it
    placing   which engine gets what, now     routing   which of several it is
    moves     requests on their way from one engine to another, with their KV
    pools     whether one engine computes a request, or two, and which
    length_predictor  how long answers will be
    rescheduling, replication  which running requests change engines; which prefixes are copied
    failures  engines that are lost, and requests that may have killed one
    totals    the state of all engines as one
    request_queue  what is open; combines the next three
    slots     which choice gets the next slot: classes, tenants, then in turn
    fair_queueing  the waiting calls of one tenant, in turn
    forecast  how long a new call would wait
    admission which calls may enter now
"""
