"""Planning a service before it is there: cost models of its steps, and loads played to it on virtual time."""
