"""Plugins from another distribution."""
