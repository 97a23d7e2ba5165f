"""The thread with the models: a queue of requests, answered; knows nothing of HTTP."""
