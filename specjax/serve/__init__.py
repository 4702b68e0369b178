"""`specjax serve`: an HTTP server with OpenAI's API, around the engine."""
