"""What a server keeps on disk: SQLite files, each checked as it is opened, and the thread that reads and writes them.

It knows how things are kept, and not what they are: that is `server`'s.
"""
