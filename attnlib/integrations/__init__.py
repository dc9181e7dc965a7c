"""attnlib under other libraries' models. Each package here is imported by its users only, never by attnlib itself."""
