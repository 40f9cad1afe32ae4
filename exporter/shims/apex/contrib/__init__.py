"""Parts that are built apart; of them the fast layer norm."""
