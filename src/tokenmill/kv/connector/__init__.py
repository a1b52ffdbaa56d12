"""What connects an engine to KV that is kept elsewhere: the scheduler's side decides by block ids, the worker's side
copies bytes. They share jobs (`core.effects`) and never import each other."""
