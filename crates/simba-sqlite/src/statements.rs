//! Every statement, in one place. Times and sessions are bound, never written into the text.

pub(crate) const BEGIN: &str = "BEGIN IMMEDIATE";
pub(crate) const COMMIT: &str = "COMMIT";
pub(crate) const ROLLBACK: &str = "ROLLBACK";

/// `mutex` → what [`Row`](crate::table::Row) is made of.
pub(crate) const ROW: &str = "\
SELECT owner, session, boot, ttl_at, until, token, acquired_at FROM simba_mutex WHERE mutex = ?1";

/// All of them, by name.
pub(crate) const ROWS: &str = "\
SELECT owner, session, boot, ttl_at, until, token, acquired_at, mutex,
       (SELECT count(*) FROM simba_waiter AS w WHERE w.mutex = m.mutex AND w.boot = ?1 AND w.until > ?2)
FROM simba_mutex AS m ORDER BY mutex";

/// `mutex, owner, session, boot, ttl_at, until, token, acquired_at`
pub(crate) const ACQUIRE: &str = "\
INSERT INTO simba_mutex (mutex, owner, session, boot, ttl_at, until, token, acquired_at)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)
ON CONFLICT (mutex) DO UPDATE SET
    owner = excluded.owner, session = excluded.session, boot = excluded.boot, ttl_at = excluded.ttl_at,
    until = excluded.until, token = excluded.token, acquired_at = excluded.acquired_at";

/// `mutex, ttl_at, until`
pub(crate) const RENEW: &str = "UPDATE simba_mutex SET ttl_at = ?2, until = ?3 WHERE mutex = ?1";

/// `mutex`
pub(crate) const FREE: &str = "\
UPDATE simba_mutex
SET owner = NULL, session = NULL, boot = NULL, ttl_at = NULL, until = NULL, acquired_at = NULL
WHERE mutex = ?1";

/// `mutex` → all entries of the queue in order, those of waiters that are gone included
pub(crate) const QUEUE: &str = "\
SELECT session, boot, until, process FROM simba_waiter WHERE mutex = ?1 ORDER BY place";

/// `boot, now`: of all mutexes.
pub(crate) const BURY_ALL: &str = "DELETE FROM simba_waiter WHERE boot <> ?1 OR until <= ?2";

/// `mutex, session, boot, now, until`: a place that has not ended.
pub(crate) const STAY: &str = "\
UPDATE simba_waiter SET until = ?5 WHERE mutex = ?1 AND session = ?2 AND boot = ?3 AND until > ?4";

/// `mutex, session, boot, until, process`: at the end, and nowhere else.
pub(crate) const ENQUEUE: &str = "\
INSERT OR REPLACE INTO simba_waiter (mutex, place, session, boot, until, process)
SELECT ?1, ifnull(max(place), 0) + 1, ?2, ?3, ?4, ?5 FROM simba_waiter WHERE mutex = ?1";

/// `mutex, session`
pub(crate) const LEAVE: &str = "DELETE FROM simba_waiter WHERE mutex = ?1 AND session = ?2";

/// `mutex, boot, now` → how many wait
pub(crate) const WAITERS: &str = "\
SELECT count(*) FROM simba_waiter WHERE mutex = ?1 AND boot = ?2 AND until > ?3";

/// What a file must be able to do before it is used.
pub(crate) const VITAL: [&str; 5] = [ROW, ACQUIRE, FREE, QUEUE, ENQUEUE];
