"""Join the proxy's log with the engine's and say, request by request, whether the text is that of the tokens."""
