"""KV of this machine as operators and clients ask for it: what is there, kept, given up or wanted later."""
