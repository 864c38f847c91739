"""The processes of a server and of bulk jobs."""
