"""The HTTP front end, of several APIs: validates, encodes, streams, measures. It speaks to the engine only through
`EngineClient`, as messages on a link, and so knows no model. `cluster.request_queue` decides whose choice goes to the
engine next and how long a call would wait; `cluster.gateway` decides what happens to requests when an engine dies.

    app        which function serves which path           http     bodies in, JSON out, keys and request ids
    openai     body -> Call (validated)                   fields   reading one JSON object with named errors
    tokens     Call -> prompt tokens -> Requests          limits   what is refused because of load
    attached   one life of an engine                      deltas   what is produced and not read yet
    client     Requests -> engines -> Streams of Deltas
    replies    the JSON bodies, whole and chunked         stream   a call from admission to its last byte
    logprobs   log probabilities in three formats         metrics  Prometheus names and what they mean
    pieces     long work, with turns for others between    begun    continuing what was begun elsewhere
    errors     failures in OpenAI's shape                 run      listening, signals, draining
    pooling    bodies that ask for vectors                vectors  the endpoints that answer with them
    tokenizing   bodies of /tokenize and /detokenize      other_fields   what becomes of fields not read here
    reading    bytes of a body -> Call                    encodings  bodies that come compressed
    helper     the port to the helper process             jobs     what that process does
    turns      places for its jobs                        clients  who calls: by key, else by address
    adapters   names and digests of LoRA adapters         config   settings
    budget     the memory that all of it takes at most
    visitors   which web pages may call                   access_log, request_log  a line for each answer, request
    result_cache   equal calls that need no engine

OpenAI's chat and completions are here; the other APIs have folders: responses, messages (Anthropic's), ollama, llama
(llama-server's own), files. repeats answers calls that are sent again. What these
share beside `generation` and `shape`:

    prompts    texts, token ids, and both in one          gaps     calls for what belongs between two texts
    renamed    complaints in a caller's own words         closed   schemas whose objects have no other properties
    durations  how long the parts of an answer took       spelling   names that are nearly known ones

uvicorn speaks HTTP; what is added to it knows nothing of models:

    listen     TCP ports, Unix sockets, TLS               bounds   of heads, connections and times
    connection   one connection: what is due when         peers    places shared over addresses
    door       what all connections share
"""
