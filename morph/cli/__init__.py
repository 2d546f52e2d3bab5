"""The command line. Modules here import only typer and the standard library until a command runs."""
