"""llama-server's own API, beside the one it shares with OpenAI: /completion, /infill, and what tells of the server.

parse      body -> Call                   shape      the JSON of answers, whole and as events
samplers   which filters run              settings   sampling settings under llama-server's names
inputs     bodies that ask for vectors    server     /props, /slots and others, which generate nothing
routes     which path leads where
"""
