"""Limits of the connections, the time and the memory that clients of a server may use.

Other modules read them as `limits.NAME`, so that tests can shorten them.
"""

CHECK_S = 0.5  # interval between two checks of all connections

# Connections, in addition to the requests of --queue
CONNECTIONS = 256  # limit in all; twice as many until the next check
CLIENT_CONNECTIONS = 128  # limit per IP address
NEW_S = 0.1  # age up to which a connection is not closed in favor of others
BACKLOG = 256  # connections that the kernel queues for the server, and that it accepts at once
OTHER_FILES = 128  # open files of the process other than connections

# A connection, in seconds
IDLE_S = 10  # between two requests, until it is closed
HEAD_S = 15.0  # until a request's header is complete, from the connection or the last response
STALL_S = 60.0  # until its client has read STALL_BYTES of the response, or all there is
STALL_BYTES = 64 * 1024
LINGER_S = 2.0  # after an error, so that its client can read that
PING_S = 1  # between two comments in a stream, which detect that its client is gone

# The header of a request
HEAD_BYTES = 32 * 1024

# The body of a request; --max-body limits its size
BODY_S = 10.0  # seconds until it is complete, plus its size / BODY_RATE
BODY_RATE = 100e3  # bytes per second
CHUNKS = 1000  # limit, in addition to one per CHUNK_BYTES: parsing a chunk takes time
CHUNK_BYTES = 128
DRAIN_S = 10.0  # seconds for discarding the rest of a refused body
DRAIN_IDLE_S = 1.0  # seconds without data that end this

# All bodies together
BODIES = 4  # bytes in memory, in units of --max-body
SMALL_BODY = 64 * 1024  # bytes; a body up to this size does not wait for memory
MEMORY_S = 15.0  # seconds that a larger one waits for memory
SLOW_RATE = 1e6  # bytes per second; slower bodies are refused while another waits for memory
SLOW_S = 0.5  # minimum time over which that rate is measured
CONCURRENT_PARSES = 2  # bodies being parsed and tokenized at a time

# Documents to be read
DOCUMENTS = 8  # being read, or waiting for that in temporary files
CONCURRENT_CONVERSIONS = 2  # being read at a time
CONVERSION_WAIT_S = 60.0  # seconds that one waits for its turn
DOCUMENT_NAME = 200  # characters

# The JSON value of a body
EXTRA_VALUES = 100_000  # limit of its values, in addition to one per token of the context

STORED_DOCUMENTS = 100  # prompts on disk that are searched for documents, the latest used
SEARCHES = 8  # searches that are running or waiting

MESSAGES = 10_000
TOOLS = 128  # in a request, and calls in a message
STOPS, STOP_CHARACTERS = 16, 500
PROMPTS = 128

# An answer
REPEATED_CHARACTERS = 64 * 1024  # longest part of a request in a response: requests keep it
LOGPROBS = 300_000  # tokens with log-probabilities, times one more than the top ones of each
ECHOED_TOKENS = 1000  # tokens of a prompt in one part of the answer
UNREAD_EVENTS = 10_000  # parts of it that its client has not read
