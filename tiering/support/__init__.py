"""Small tools that every layer and every backend author may use. Nothing here knows tiers, slots or tasks of ours."""
