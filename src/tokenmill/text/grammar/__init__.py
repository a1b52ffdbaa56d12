"""What an answer must look like: constraints as callers give them, and the grammars they become."""
