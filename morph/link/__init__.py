"""How a manager and its workers communicate: messages, proofs, certificates, and both ends of the connection."""
