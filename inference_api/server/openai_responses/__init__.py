"""The routes that speak OpenAI's Responses API, without its memory: nothing of a response is stored."""
