"""Files: written completely or not at all, cached, downloaded, and pickles read without running their code."""
