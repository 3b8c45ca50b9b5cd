"""One module a source of evidence: each reads, none judges."""
