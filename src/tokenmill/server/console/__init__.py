"""The console: pages in a browser that show and steer this server through its own HTTP API (`static`)."""
