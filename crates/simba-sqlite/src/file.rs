//! The way to an open file: look where it lies, look what it is, and only then touch it.

use std::fs::{self, DirBuilder, File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode, OpenFlags, Transaction, TransactionBehavior};
use simba_core::{Error, ErrorKind, Result};

use crate::error::{explain, foreign, system, unfit};
use crate::schema::{self, APPLICATION_ID, Mark, SCHEMA, VERSION};
use crate::statements::VITAL;
use crate::{local, machine, patience};

/// Longer paths SQLite does not take, with the endings of the files beside.
const MAX_PATH: usize = 490;
/// Small pages: a change of owner touches one row.
const PAGE_SIZE: u32 = 1024;
/// In KiB, as SQLite takes it: enough for the rows of thousands of mutexes, and the system caches the rest.
const CACHE: i32 = -512;

/// An open file of ours.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) connection: Connection,
    /// Without links, so that all processes put the files beside it in one place.
    pub(crate) path: PathBuf,
    /// The file, its journal and the index of that, as they were when the file was opened.
    parts: [Part; 3],
}

/// A file that SQLite has open, with what tells it from another one under the same name.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Part {
    /// Finds the file that has this name now.
    fn find(path: PathBuf) -> Result<Self> {
        let found = fs::metadata(&path).map_err(|error| system(&path, "look at", error))?;
        Ok(Self { path, device: found.dev(), inode: found.ino() })
    }

    fn check(&self) -> Result<()> {
        match fs::metadata(&self.path) {
            Ok(found) if (found.dev(), found.ino()) == (self.device, self.inode) => Ok(()),
            Ok(_) => {
                let message = "was replaced while it was in use: restart every program that uses it";
                Err(unfit(&self.path, message))
            }
            Err(error) => {
                let message = "was taken away while it was in use: restart every program that uses it";
                Err(unfit(&self.path, message).with_source(error))
            }
        }
    }
}

impl OpenFile {
    /// Fails unless all three files are still those that SQLite has open. SQLite itself removes none of them while
    /// a connection is open. A program that opens others under the same names would see other owners.
    pub(crate) fn check_parts(&self) -> Result<()> {
        self.parts.iter().try_for_each(Part::check)
    }
}

/// Opens the file, made and set up if need be. Anything that is not ours is left as it is.
pub(crate) fn open(path: &Path) -> Result<OpenFile> {
    let path = settle(path)?;
    let found = fs::metadata(&path).map_err(|error| system(&path, "look at", error))?;
    check_place(&path, &found)?;
    let empty = check_content(&path)?;
    if !empty {
        check_journal(&path)?;
    }
    let mut connection =
        Connection::open_with_flags(&path, flags()).map_err(|error| explain(&path, error))?;
    prepare(&mut connection, &path, empty)?;
    // The first read after a change of the journal mode opens the journal.
    Mark::read(&connection).map_err(|error| explain(&path, error))?;
    let parts =
        [Part::find(path.clone())?, Part::find(beside(&path, "-wal"))?, Part::find(beside(&path, "-shm"))?];
    Ok(OpenFile { connection, path, parts })
}

fn flags() -> OpenFlags {
    OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX
}

/// Returns the path with `ending` appended.
fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

// ===== where it lies =====

/// The real path of the file, which is there from here on.
fn settle(path: &Path) -> Result<PathBuf> {
    let Some(name) = path.file_name() else { return Err(unfit(path, "names no file: name one")) };
    match fs::symlink_metadata(path) {
        Ok(_) => fs::canonicalize(path).map_err(|error| system(path, "follow", error)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let folder = match path.parent() {
                Some(folder) if folder != Path::new("") => folder,
                _ => Path::new("."),
            };
            let path = make_folder(folder)?.join(name);
            check_length(&path)?;
            make_file(&path)?;
            Ok(path)
        }
        Err(error) => Err(system(path, "look at", error)),
    }
}

/// Makes the folder for this user alone, unless it is there; on a local file system, or not at all.
fn make_folder(folder: &Path) -> Result<PathBuf> {
    let there = folder.ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("."));
    local::check(if there == Path::new("") { Path::new(".") } else { there })?;
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|error| system(folder, "make the folder", error))?;
    fs::canonicalize(folder).map_err(|error| system(folder, "look at", error))
}

fn check_length(path: &Path) -> Result<()> {
    if path.as_os_str().len() > MAX_PATH {
        return Err(unfit(path, "is a longer path than SQLite takes: choose a shorter one"));
    }
    Ok(())
}

/// Refuses what SQLite would not keep in one piece.
fn check_place(path: &Path, found: &Metadata) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    check_length(path)?;
    if !found.is_file() {
        let kind = if found.is_dir() { "is a folder" } else { "is no plain file" };
        return Err(unfit(path, &format!("{kind}: name a file")));
    }
    local::check(folder)?;
    if found.nlink() > 1 {
        let message = "has several names (hard links), and each would get a journal of its own: keep one";
        return Err(unfit(path, message));
    }
    let mounted = machine::is_mount_point(path, folder);
    if mounted.map_err(|error| system(path, "look at", error))? {
        return Err(unfit(
            path,
            "is mounted by itself, without the files beside it that all its users must share: mount its folder",
        ));
    }
    Ok(())
}

// ===== what it is =====

/// How often what another process may be about to finish is looked at, and after how long again.
const LOOKS: u32 = 20;
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Refuses a file that is not ours, by a look that changes nothing and leaves nothing beside it. Whether there
/// is nothing in it yet.
fn check_content(path: &Path) -> Result<bool> {
    let mut look = 0;
    loop {
        look += 1;
        let last = look == LOOKS;
        match look_at(path) {
            // A process that is just writing shows half of its work to one that takes no locks.
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseCorrupt) && !last => {}
            Err(error) => return Err(explain(path, error)),
            // What is not in the file yet may be in a journal: of somebody who makes it ours, or his.
            Ok(mark) if mark.empty && has_journal(path) && !last => {}
            Ok(mark) if mark.empty && has_journal(path) => {
                return Err(foreign(path, "is in use by another program"));
            }
            Ok(mark) => return check_mark(path, mark).map(|()| mark.empty),
        }
        thread::sleep(LOOK_AGAIN);
    }
}

/// Whether a journal with something in it lies beside the file.
fn has_journal(path: &Path) -> bool {
    ["-journal", "-wal"]
        .iter()
        .any(|ending| fs::metadata(beside(path, ending)).is_ok_and(|found| found.len() > 0))
}

/// How long a process may take between locking the file and creating or removing the journal: far more than the
/// microseconds that it needs.
const JOURNAL_LIMIT: Duration = Duration::from_secs(2);
/// How many checks it may take besides. A machine that stands still lets time pass and nobody work.
const JOURNAL_CHECKS: u32 = 100;

/// Refuses a file whose journal was removed while another connection has it open: SQLite would make a new journal,
/// and both sides would see a free mutex where the other holds it.
fn check_journal(path: &Path) -> Result<()> {
    let (begun, mut checks) = (Instant::now(), 0);
    while !["-wal", "-shm"].iter().all(|ending| beside(path, ending).exists()) {
        match is_closed(path) {
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) => {}
            // Other errors are reported by the connection that is opened next.
            Ok(()) | Err(_) => break,
        }
        checks += 1;
        if is_journal_gone(checks, begun.elapsed()) {
            return Err(unfit(
                path,
                "is open in another program, and its journal (-wal, -shm) was removed: stop every program that \
                 uses it, then start them again",
            ));
        }
        thread::sleep(LOOK_AGAIN);
    }
    Ok(())
}

/// Returns whether another process has had the time to create or remove the journal.
fn is_journal_gone(checks: u32, waited: Duration) -> bool {
    checks >= JOURNAL_CHECKS && waited > JOURNAL_LIMIT
}

/// Succeeds if no connection of any process has the file open, and fails with `DatabaseBusy` otherwise: each has a
/// shared lock on the file, and the first read in this mode takes the exclusive one. The lock is asked of SQLite and
/// not of the system, since closing another descriptor would drop the locks of this process.
fn is_closed(path: &Path) -> rusqlite::Result<()> {
    let connection = Connection::open_with_flags(path, flags())?;
    connection.busy_timeout(Duration::ZERO)?;
    connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
    Mark::read(&connection).map(drop)
}

/// Reads the mark without locks and without the journal: SQLite takes the file for one that nobody writes.
fn look_at(path: &Path) -> rusqlite::Result<Mark> {
    let flags =
        OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_URI;
    Mark::read(&Connection::open_with_flags(immutable(path), flags)?)
}

fn immutable(path: &Path) -> String {
    let mut uri = String::from("file:");
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' => {
                uri.push(char::from(*byte))
            }
            other => uri.push_str(&format!("%{other:02x}")),
        }
    }
    uri + "?immutable=1"
}

fn check_mark(path: &Path, mark: Mark) -> Result<()> {
    match mark {
        Mark { application: 0, version: 0, empty: true } => Ok(()),
        Mark { application: APPLICATION_ID, version: ..=VERSION, .. } => Ok(()),
        Mark { application: APPLICATION_ID, .. } => Err(unfit(
            path,
            "was made by a newer version of Simba: upgrade this program, or give it a file of its own",
        )),
        _ => Err(foreign(path, "is a database of another program")),
    }
}

// ===== making it =====

/// Puts a whole file of ours under the name, unless somebody was faster.
fn make_file(path: &Path) -> Result<()> {
    let draft = path.with_extension(format!("{:016x}.new", getrandom::u64().unwrap_or_default()));
    let made = write_draft(&draft).and_then(|()| match machine::rename_new(&draft, path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        // A file system that cannot: an empty file, to be filled in place.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => match machine::create_empty(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(system(path, "make", error)),
            _ => Ok(()),
        },
        Err(error) => Err(system(path, "make", error)),
    });
    // After a rename it is not there any more.
    let _ = fs::remove_file(&draft);
    made
}

/// Writes a whole file that nobody else knows of yet.
fn write_draft(draft: &Path) -> Result<()> {
    machine::create_empty(draft).map_err(|error| system(draft, "make", error))?;
    let written = Connection::open_with_flags(draft, flags()).and_then(|connection| {
        // Nobody depends on it before the rename; one sync at the end is enough.
        connection.pragma_update(None, "synchronous", "OFF")?;
        fill(&connection)?;
        to_wal(&connection)?;
        connection.close().map_err(|(_, error)| error)
    });
    written.map_err(|error| explain(draft, error))?;
    File::open(draft).and_then(|file| file.sync_all()).map_err(|error| system(draft, "write", error))
}

/// Fills a file, if it is empty still.
fn fill(connection: &Connection) -> rusqlite::Result<()> {
    connection.pragma_update(None, "page_size", PAGE_SIZE)?;
    connection.execute_batch("BEGIN EXCLUSIVE")?;
    if Mark::read(connection)?.empty {
        connection.execute_batch(SCHEMA)?;
    }
    connection.execute_batch("COMMIT")
}

/// Turns the journal to WAL, which is a no-op on a file that has it. The journal mode that it has then.
fn to_wal(connection: &Connection) -> rusqlite::Result<String> {
    let turn = || connection.pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get(0));
    // SQLite does not wait here for others who open the same file for the first time.
    for _ in 1..LOOKS {
        match turn() {
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) => {
                thread::sleep(LOOK_AGAIN);
            }
            turned => return turned,
        }
    }
    turn()
}

/// Settles how the connection works, and that it can.
fn prepare(connection: &mut Connection, path: &Path, empty: bool) -> Result<()> {
    let explained = |error| explain(path, error);
    // Needs `&mut` from rusqlite 0.41 on.
    connection.busy_handler(Some(patience::wait)).map_err(explained)?;
    connection.set_prepared_statement_cache_capacity(64);
    if connection.is_readonly("main").map_err(explained)? {
        let message = format!("{} cannot be written: make it writable for this user", path.display());
        return Err(Error::new(ErrorKind::Denied, message).with_backend(crate::error::NAME));
    }
    connection.pragma_update(None, "synchronous", "NORMAL").map_err(explained)?;
    connection.pragma_update(None, "cache_size", CACHE).map_err(explained)?;
    if empty {
        fill(connection).map_err(explained)?;
    }
    check_mark(path, Mark::read(connection).map_err(explained)?)?;
    match to_wal(connection).map_err(explained)?.as_str() {
        "wal" => check_tables(connection).map_err(explained),
        other => {
            Err(unfit(path, &format!("stays in journal mode `{other}`, WAL is needed: choose another path")))
        }
    }
}

/// Makes sure that the statements that count fit the tables. A table that is missing is made anew, and one of an
/// earlier version gets the columns that it lacks.
fn check_tables(connection: &Connection) -> rusqlite::Result<()> {
    let fit = || VITAL.iter().try_for_each(|statement| connection.prepare_cached(statement).map(drop));
    if fit().is_ok() {
        return Ok(());
    }
    let transaction = Transaction::new_unchecked(connection, TransactionBehavior::Immediate)?;
    schema::apply(&transaction)?;
    fit()?;
    transaction.commit()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_of_any_bytes_fits_into_a_uri() {
        assert_eq!(immutable(Path::new("/a b/c?%é.db")), "file:/a%20b/c%3f%25%c3%a9.db?immutable=1");
    }

    #[test]
    fn a_machine_that_stood_still_is_no_reason_to_refuse_a_file() {
        assert!(!is_journal_gone(1, Duration::from_secs(60)));
        assert!(!is_journal_gone(JOURNAL_CHECKS, JOURNAL_LIMIT));
        assert!(is_journal_gone(JOURNAL_CHECKS, 2 * JOURNAL_LIMIT));
    }

    #[test]
    fn only_an_empty_file_and_one_of_ours_are_taken() {
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
