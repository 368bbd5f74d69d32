"""What a language model can do: multiple choice and the last word, scored as lm-eval does."""
