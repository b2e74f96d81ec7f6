//! All statements. Values are bound, never written into the text.

pub(crate) const BEGIN: &str = "BEGIN IMMEDIATE";
pub(crate) const COMMIT: &str = "COMMIT";
pub(crate) const ROLLBACK: &str = "ROLLBACK";

/// `mutex` → the columns of [`Row`](crate::tables::Row), the last one being whether the queue has entries
pub(crate) const ROW: &str = "\
SELECT owner, session, boot, ttl_at, until, token, acquired_at,
       EXISTS (SELECT 1 FROM simba_waiter WHERE mutex = ?1)
FROM simba_mutex WHERE mutex = ?1";

/// `boot, now` → the columns of [`Row`](crate::tables::Row), name and number of waiters of all mutexes by name
pub(crate) const ROWS: &str = "\
SELECT owner, session, boot, ttl_at, until, token, acquired_at, FALSE, mutex,
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

/// `mutex, session, token`: frees the mutex if this session has it under this token
pub(crate) const FREE: &str = "\
UPDATE simba_mutex
SET owner = NULL, session = NULL, boot = NULL, ttl_at = NULL, until = NULL, acquired_at = NULL
WHERE mutex = ?1 AND ifnull(session, 0) = ?2 AND token = ?3";

/// `mutex` → all entries of the queue in order, expired ones included
pub(crate) const QUEUE: &str = "\
SELECT session, boot, until, process FROM simba_waiter WHERE mutex = ?1 ORDER BY place";

/// `boot, now`: deletes the expired entries of all mutexes
pub(crate) const DELETE_EXPIRED: &str = "DELETE FROM simba_waiter WHERE boot <> ?1 OR until <= ?2";

/// `mutex, session, boot, now, until`: extends an entry that has not expired
pub(crate) const EXTEND_ENTRY: &str = "\
UPDATE simba_waiter SET until = ?5 WHERE mutex = ?1 AND session = ?2 AND boot = ?3 AND until > ?4";

/// `mutex, session, boot, until, process`: adds an entry at the end of the queue, and replaces an earlier one
pub(crate) const ENQUEUE: &str = "\
INSERT OR REPLACE INTO simba_waiter (mutex, place, session, boot, until, process)
SELECT ?1, ifnull(max(place), 0) + 1, ?2, ?3, ?4, ?5 FROM simba_waiter WHERE mutex = ?1";

/// `mutex, session`
pub(crate) const LEAVE: &str = "DELETE FROM simba_waiter WHERE mutex = ?1 AND session = ?2";

/// `mutex, boot, now` → the number of waiters
pub(crate) const WAITERS: &str = "\
SELECT count(*) FROM simba_waiter WHERE mutex = ?1 AND boot = ?2 AND until > ?3";

/// The statements that the tables must fit before the file is used.
pub(crate) const REQUIRED: [&str; 5] = [ROW, ACQUIRE, FREE, QUEUE, ENQUEUE];
