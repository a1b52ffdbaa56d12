"""`tokenmill bench`: hands to `bench` what it measures in process, one file for each benchmark."""
