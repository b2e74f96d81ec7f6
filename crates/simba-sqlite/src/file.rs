//! Opens the file: checks where it is and what it contains before it writes to it.

use std::fs::{self, DirBuilder, File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode, OpenFlags, Transaction, TransactionBehavior};
use simba_core::{Error, ErrorKind, Result};

use crate::error::{explain, foreign, system, unusable};
use crate::names::with_suffix;
use crate::schema::{self, APPLICATION_ID, Mark, SCHEMA, VERSION};
use crate::statements::REQUIRED;
use crate::{busy_timeout, file_system, machine};

/// The longest path that SQLite supports, with room for the suffixes of the companion files.
const MAX_PATH: usize = 490;
/// Small pages: a change of owner touches one row.
const PAGE_SIZE: u32 = 1024;
/// The cache size, in KiB if negative: enough for the rows of thousands of mutexes, and the system caches the rest.
const CACHE: i32 = -512;

/// Opens the file, after creating it and its tables if needed. Returns its path without links, so that all processes use
/// the same companion files. A file of another program is not changed.
pub(crate) fn open(path: &Path) -> Result<(Connection, PathBuf)> {
    let path = resolve(path)?;
    let found = fs::metadata(&path).map_err(|error| system(&path, "read the metadata of", error))?;
    check_location(&path, &found)?;
    let empty = check_content(&path)?;
    if !empty {
        check_journal(&path)?;
    }
    let mut connection =
        Connection::open_with_flags(&path, flags()).map_err(|error| explain(&path, error))?;
    prepare(&mut connection, &path, empty)?;
    // The first read after a change of the journal mode opens the journal.
    Mark::read(&connection).map_err(|error| explain(&path, error))?;
    Ok((connection, path))
}

fn flags() -> OpenFlags {
    OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX
}

// ===== location =====

/// Returns the path without links, after creating the file if it does not exist.
fn resolve(path: &Path) -> Result<PathBuf> {
    let Some(name) = path.file_name() else { return Err(unusable(path, "names no file: name one")) };
    match fs::symlink_metadata(path) {
        Ok(_) => fs::canonicalize(path).map_err(|error| system(path, "resolve", error)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
            let path = create_folder(folder)?.join(name);
            check_length(&path)?;
            create_file(&path)?;
            Ok(path)
        }
        Err(error) => Err(system(path, "read the metadata of", error)),
    }
}

/// Creates the folder for this user alone, unless it exists. Refuses other file systems than local ones before that.
fn create_folder(folder: &Path) -> Result<PathBuf> {
    let existing = folder.ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("."));
    file_system::check(existing)?;
    let created = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    created.map_err(|error| system(folder, "create the folder", error))?;
    fs::canonicalize(folder).map_err(|error| system(folder, "resolve", error))
}

fn check_length(path: &Path) -> Result<()> {
    if path.as_os_str().len() > MAX_PATH {
        return Err(unusable(path, "is a longer path than SQLite supports: choose a shorter one"));
    }
    Ok(())
}

/// Refuses paths under which not all processes would use the same file, journal and locks.
fn check_location(path: &Path, found: &Metadata) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    check_length(path)?;
    if !found.is_file() {
        let kind = if found.is_dir() { "is a folder" } else { "is no regular file" };
        return Err(unusable(path, &format!("{kind}: name a file")));
    }
    file_system::check(folder)?;
    if found.nlink() > 1 {
        let message = "has several names (hard links), and each would get its own journal: keep one";
        return Err(unusable(path, message));
    }
    let mounted = machine::is_mount_point(path, folder);
    if mounted.map_err(|error| system(path, "read the mount of", error))? {
        return Err(unusable(
            path,
            "is mounted without its companion files (-wal, -shm), which all processes must share: mount its folder",
        ));
    }
    Ok(())
}

// ===== content =====

/// How long another process may take to finish a write, or between locking the file and creating or removing the
/// journal: far more than the microseconds that it needs.
const LIMIT: Duration = Duration::from_secs(2);
/// How many attempts are made, besides the time: while the machine is paused, time passes but the other process does not
/// run.
const ATTEMPTS: u32 = 100;
const RETRY_AFTER: Duration = Duration::from_millis(5);

/// Refuses a file of another program by a read that changes nothing and creates no companion file. Returns whether the
/// file is empty.
fn check_content(path: &Path) -> Result<bool> {
    // The tables may still be in the journal of a process that creates them: of Simba or of another program.
    let read = || read_mark(path).map(|mark| (mark, mark.empty && has_journal(path)));
    let found = retry(read, |found| match found {
        Ok((_, in_journal)) => *in_journal,
        // This read takes no locks, so it sees half of a write that another process is making.
        Err(error) => error.sqlite_error_code() == Some(ErrorCode::DatabaseCorrupt),
    });
    let (mark, in_journal) = found.map_err(|error| explain(path, error))?;
    if in_journal {
        return Err(foreign(path, "is in use by another program"));
    }
    check_mark(path, mark).map(|()| mark.empty)
}

/// Repeats an attempt while it is unfinished, until another process has had the time to finish its work. The last
/// attempt begins after that.
fn retry<T>(attempt: impl Fn() -> T, is_unfinished: impl Fn(&T) -> bool) -> T {
    let (begun, mut attempts) = (Instant::now(), 0);
    loop {
        attempts += 1;
        let is_last = is_last(attempts, begun.elapsed());
        let outcome = attempt();
        if is_last || !is_unfinished(&outcome) {
            return outcome;
        }
        thread::sleep(RETRY_AFTER);
    }
}

/// Returns whether an attempt that begins now is the last one.
fn is_last(attempts: u32, waited: Duration) -> bool {
    attempts >= ATTEMPTS && waited > LIMIT
}

/// Returns whether the file has a journal that is not empty.
fn has_journal(path: &Path) -> bool {
    ["-journal", "-wal"]
        .iter()
        .any(|suffix| fs::metadata(with_suffix(path, suffix)).is_ok_and(|found| found.len() > 0))
}

/// Refuses a file whose journal was removed while another connection has it open: SQLite would create a new journal,
/// and both sides would see a free mutex where the other holds it.
fn check_journal(path: &Path) -> Result<()> {
    let removed = || {
        let missing = ["-wal", "-shm"].iter().any(|suffix| !with_suffix(path, suffix).exists());
        // Other errors are reported by the connection that is opened next.
        let open = || matches!(is_closed(path), Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy));
        missing && open()
    };
    if retry(removed, |removed| *removed) {
        return Err(unusable(
            path,
            "is open in another program, and its journal (-wal, -shm) was removed: stop every program that uses it, \
             then start them again",
        ));
    }
    Ok(())
}

/// Succeeds if no connection of any process has the file open, and fails with `DatabaseBusy` otherwise: each connection
/// has a shared lock on the file, and the first read in this mode takes the exclusive one. The lock is taken through
/// SQLite and not through the system, since closing another descriptor would drop the locks of this process.
fn is_closed(path: &Path) -> rusqlite::Result<()> {
    let connection = Connection::open_with_flags(path, flags())?;
    connection.busy_timeout(Duration::ZERO)?;
    connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
    Mark::read(&connection).map(drop)
}

/// Reads the mark without locks and without the journal, by telling SQLite that the file is immutable.
fn read_mark(path: &Path) -> rusqlite::Result<Mark> {
    let flags =
        OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_URI;
    Mark::read(&Connection::open_with_flags(immutable(path), flags)?)
}

fn immutable(path: &Path) -> String {
    let mut uri = String::from("file:");
    for byte in path.as_os_str().as_bytes() {
        match byte {
            byte if byte.is_ascii_alphanumeric() || b"/.-_".contains(byte) => uri.push(char::from(*byte)),
            byte => uri.push_str(&format!("%{byte:02x}")),
        }
    }
    uri + "?immutable=1"
}

fn check_mark(path: &Path, mark: Mark) -> Result<()> {
    match mark {
        Mark { application: 0, version: 0, empty: true } => Ok(()),
        Mark { application: APPLICATION_ID, version: ..=VERSION, .. } => Ok(()),
        Mark { application: APPLICATION_ID, .. } => Err(unusable(
            path,
            "was created by a newer version of Simba: upgrade this program, or configure another path",
        )),
        _ => Err(foreign(path, "is a database of another program")),
    }
}

// ===== creation =====

/// Creates the file with its tables in one step (write a draft, rename it), unless another process was first.
fn create_file(path: &Path) -> Result<()> {
    let draft = path.with_extension(format!("{:016x}.new", getrandom::u64().unwrap_or_default()));
    let created = write_draft(&draft).and_then(|()| {
        let renamed = machine::rename_new(&draft, path).or_else(|error| match error.kind() {
            // The file system does not support it: create an empty file, and the tables in it later.
            io::ErrorKind::InvalidInput => machine::create_empty(path),
            _ => Err(error),
        });
        match renamed {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(system(path, "create", error)),
            _ => Ok(()),
        }
    });
    // Fails after a rename.
    let _ = fs::remove_file(&draft);
    created
}

/// Writes a complete database under a name that no other process knows.
fn write_draft(draft: &Path) -> Result<()> {
    machine::create_empty(draft).map_err(|error| system(draft, "create", error))?;
    let written = Connection::open_with_flags(draft, flags()).and_then(|connection| {
        // No process uses it before the rename; one sync at the end is enough.
        connection.pragma_update(None, "synchronous", "OFF")?;
        create_tables(&connection)?;
        set_wal(&connection)?;
        connection.close().map_err(|(_, error)| error)
    });
    written.map_err(|error| explain(draft, error))?;
    File::open(draft).and_then(|file| file.sync_all()).map_err(|error| system(draft, "write", error))
}

/// Creates the tables, if the file is still empty.
fn create_tables(connection: &Connection) -> rusqlite::Result<()> {
    connection.pragma_update(None, "page_size", PAGE_SIZE)?;
    connection.execute_batch("BEGIN EXCLUSIVE")?;
    if Mark::read(connection)?.empty {
        connection.execute_batch(SCHEMA)?;
    }
    connection.execute_batch("COMMIT")
}

/// Sets the journal mode to WAL, if it is another one. Returns the journal mode of the file after that.
fn set_wal(connection: &Connection) -> rusqlite::Result<String> {
    let set = || connection.pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get(0));
    // SQLite does not wait here for other processes that open the same file for the first time.
    retry(
        set,
        |mode| matches!(mode, Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy)),
    )
}

/// Configures the connection and checks that it can write.
fn prepare(connection: &mut Connection, path: &Path, empty: bool) -> Result<()> {
    let explained = |error| explain(path, error);
    // Needs `&mut` from rusqlite 0.41 on.
    connection.busy_handler(Some(busy_timeout::wait)).map_err(explained)?;
    connection.set_prepared_statement_cache_capacity(64);
    if connection.is_readonly("main").map_err(explained)? {
        let message = format!("{} cannot be written: make it writable for this user", path.display());
        return Err(Error::new(ErrorKind::Denied, message).with_backend(crate::error::NAME));
    }
    connection.pragma_update(None, "synchronous", "NORMAL").map_err(explained)?;
    connection.pragma_update(None, "cache_size", CACHE).map_err(explained)?;
    if empty {
        create_tables(connection).map_err(explained)?;
    }
    check_mark(path, Mark::read(connection).map_err(explained)?)?;
    match set_wal(connection).map_err(explained)?.as_str() {
        "wal" => check_tables(connection).map_err(explained),
        other => {
            let message = format!("stays in journal mode `{other}`, WAL is needed: choose another path");
            Err(unusable(path, &message))
        }
    }
}

/// Checks that the required statements fit the tables. Creates tables that are missing, and adds the columns that
/// tables of an earlier version lack.
fn check_tables(connection: &Connection) -> rusqlite::Result<()> {
    let prepare = || REQUIRED.iter().try_for_each(|statement| connection.prepare_cached(statement).map(drop));
    if prepare().is_ok() {
        return Ok(());
    }
    let transaction = Transaction::new_unchecked(connection, TransactionBehavior::Immediate)?;
    schema::apply(&transaction)?;
    prepare()?;
    transaction.commit()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_of_any_bytes_is_encoded_in_the_uri() {
        assert_eq!(immutable(Path::new("/a b/c?%é.db")), "file:/a%20b/c%3f%25%c3%a9.db?immutable=1");
    }

    #[test]
    fn file_is_not_refused_after_a_pause_of_the_machine() {
        assert!(!is_last(1, Duration::from_secs(60)));
        assert!(!is_last(ATTEMPTS, LIMIT));
        assert!(is_last(ATTEMPTS, 2 * LIMIT));
    }

    /// Such as one that was paused in the middle of it.
    #[test]
    fn write_of_another_process_may_take_longer_than_a_second() {
        let begun = Instant::now();
        assert!(retry(|| begun.elapsed() > Duration::from_millis(1800), |finished| !finished));
    }

    #[test]
    fn only_an_empty_file_and_a_simba_database_are_accepted() {
        let mark = |application, version, empty| Mark { application, version, empty };
        let verdict = |mark| check_mark(Path::new("x"), mark).map_err(|error| error.kind());
        assert_eq!(verdict(mark(0, 0, true)), Ok(()));
        assert_eq!(verdict(mark(APPLICATION_ID, VERSION, false)), Ok(()));
        assert_eq!(verdict(mark(APPLICATION_ID, VERSION + 1, false)), Err(ErrorKind::Config));
        assert_eq!(verdict(mark(0, 0, false)), Err(ErrorKind::Protocol));
        assert_eq!(verdict(mark(7, 0, true)), Err(ErrorKind::Protocol));
        assert_eq!(verdict(mark(0, 3, true)), Err(ErrorKind::Protocol));
    }
}
