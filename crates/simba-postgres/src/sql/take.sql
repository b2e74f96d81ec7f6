-- Renews the mutex if it is ours. If $7, takes it if it is free and surely nobody waits. $6 is the token that lapsed.
-- A row that does not match is not locked, and nothing is written. A free row that got another token while this
-- statement waited for it is not taken: the session may have released without a token meanwhile, see free. The subquery
-- sees the row as it was before.
UPDATE {mutex} m SET
    owner = $2,
    session = $3,
    token = CASE WHEN m.session = $3 AND m.until > clock_timestamp() AND m.token <> $6 THEN m.token
        ELSE greatest(m.token + 1, {micros}) END,
    acquired_at = CASE WHEN m.session = $3 AND m.until > clock_timestamp() AND m.token <> $6
        THEN m.acquired_at ELSE clock_timestamp() END,
    renewed_at = clock_timestamp(),
    ttl_at = clock_timestamp() + make_interval(secs => $4),
    until = clock_timestamp() + make_interval(secs => $5)
WHERE {bound} {synced} m.mutex = $1 AND (
    (m.session = $3 AND m.until > clock_timestamp())
    OR ($7 AND m.until <= clock_timestamp() AND m.waited <= 0
        AND m.token = (SELECT s.token FROM {mutex} s WHERE s.mutex = m.mutex)))
RETURNING m.session, m.token, m.watched
