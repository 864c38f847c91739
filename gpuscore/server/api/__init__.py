"""The application: routes, API keys, bodies, dialects and answers."""
