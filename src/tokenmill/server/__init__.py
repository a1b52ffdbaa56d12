"""The HTTP front end, of several APIs: validates, encodes, streams, measures. It speaks to the engine only through
`EngineClient`, as messages on a link, and so knows no model. `cluster.request_queue` decides whose choice goes to the
engine next and how long a call would wait; `cluster.gateway` decides what happens to requests when an engine dies.

    app        which function serves which path           layers       what every call passes on its way there
    config     settings                                   http         the gate: keys, names of calls, errors
    callers    which web pages may call, and scopes       limits       what is refused because of load; bodies
    models     which model answers a call                 adapters     names and digests of LoRA adapters
    generation   a call from its body to its answer       stream       from admission to its last byte
    qos        on what terms a call is served             beam_search  several steps of an engine for one call
    vectors    calls that are answered with vectors       service      paths that generate nothing
    client     Requests -> engines -> Streams of Deltas   deltas       what is produced and not read yet
    engine_link  one life of an engine                    grammars     constraints -> grammars
    result_cache   equal calls that need no engine        audit      the layer that notes calls

What the paths of each API do is in the room `api`. Folders are for what is done about calls of any API: `upstream`,
`resume`, `idempotency`, `files` (and batches), `kv`, `admin`, `console`, `openapi`.

uvicorn speaks HTTP; what is added to it knows nothing of models:

    listen     TCP ports, Unix sockets, TLS               connections  what all connections share: bounds, places
    connection   one connection: what is due when         run          listening, signals, draining
    access_log   a line for each answer
"""
