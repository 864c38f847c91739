"""The HTTP server: decodes and checks requests, asks the engine, answers."""
