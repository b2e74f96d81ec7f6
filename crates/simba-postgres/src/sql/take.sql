-- Takes the mutex if it is free and surely nobody waits; renews it if it is ours. $6 is the token that lapsed.
-- A row that does not match is not locked, and nothing is written.
UPDATE {mutex} m SET
    owner = $2,
    session = $3,
    token = CASE WHEN m.session = $3 AND m.until > statement_timestamp() AND m.token <> $6 THEN m.token
        ELSE greatest(m.token + 1, {micros}) END,
    acquired_at = CASE WHEN m.session = $3 AND m.until > statement_timestamp() AND m.token <> $6
        THEN m.acquired_at ELSE statement_timestamp() END,
    renewed_at = statement_timestamp(),
    ttl_at = statement_timestamp() + make_interval(secs => $4),
    until = statement_timestamp() + make_interval(secs => $5)
WHERE {bound} m.mutex = $1 AND (
    (m.session = $3 AND m.until > statement_timestamp())
    OR (m.until <= statement_timestamp() AND m.waited <= 0))
RETURNING m.session, m.token, m.watched
