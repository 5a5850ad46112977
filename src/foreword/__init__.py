"""Foreword: serve Hugging Face models and never compute the same prompt prefix twice."""
