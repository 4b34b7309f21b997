"""Routes and admission."""
