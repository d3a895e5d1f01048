"""What is typed: `stability-harness COMMAND`, each command in a file. Nothing else imports from here."""
