"""The contract that the proxy, the plugin inside vLLM and the verifier share: records, log files, SSE."""

__version__ = "0.1.0"
