"""How a manager and its workers talk: messages, proofs, certificates, and the connection from either end."""
