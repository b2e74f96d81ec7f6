//! One log and one fenced resource for all processes of a test.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use simba_core::{Clock, FencingToken, Moment, SystemClock};

/// The kinds of lines of a contestant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Note {
    /// The contestant leads.
    Acquired,
    /// It wrote to the resource.
    Wrote,
    /// The resource refused its token.
    Refused,
    /// Its work is over.
    Ended,
    /// It was notified of its loss.
    Lost,
    /// It waits for another holder; under token 0.
    Waits,
}

const NOTES: [(Note, &str); 6] = [
    (Note::Acquired, "acquired"),
    (Note::Wrote, "wrote"),
    (Note::Refused, "refused"),
    (Note::Ended, "ended"),
    (Note::Lost, "lost"),
    (Note::Waits, "waits"),
];

/// A line of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Line {
    /// On a clock that all processes share.
    pub(super) at: Duration,
    pub(super) pid: u32,
    pub(super) note: Note,
    pub(super) token: u64,
}

/// The files in one directory.
pub(super) struct SharedLog {
    log: PathBuf,
    fence: PathBuf,
}

impl SharedLog {
    pub(super) fn new(dir: &Path) -> Self {
        Self { log: dir.join("log"), fence: dir.join("fence") }
    }

    /// Writes a line. The lines of all processes are in the order in which they were written.
    pub(super) fn note(&self, note: Note, token: FencingToken) -> io::Result<()> {
        let _lock = self.lock()?;
        self.append(note, token)
    }

    /// Writes to the resource, which refuses every token below the greatest one so far.
    pub(super) fn write(&self, token: FencingToken) -> io::Result<()> {
        let mut fence = self.lock()?;
        let mut greatest = String::new();
        fence.read_to_string(&mut greatest)?;
        if token.get() < greatest.parse().unwrap_or(0) {
            return self.append(Note::Refused, token);
        }
        fence.rewind()?;
        fence.set_len(0)?;
        fence.write_all(token.get().to_string().as_bytes())?;
        self.append(Note::Wrote, token)
    }

    /// Locks the resource until the file is closed.
    pub(super) fn lock(&self) -> io::Result<File> {
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&self.fence)?;
        flock(&file, FlockOperation::LockExclusive)?;
        Ok(file)
    }

    fn append(&self, note: Note, token: FencingToken) -> io::Result<()> {
        let word = NOTES.iter().find(|(known, _)| *known == note).map_or("", |(_, word)| word);
        let (at, pid) = (uptime().as_micros(), std::process::id());
        let mut log = OpenOptions::new().append(true).create(true).open(&self.log)?;
        log.write_all(format!("{at} {pid} {word} {}\n", token.get()).as_bytes())
    }

    /// Reads the lines that were written since the last call.
    pub(super) fn read_new(&self, read: &mut Lines) -> io::Result<()> {
        let mut log = match File::open(&self.log) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            log => log?,
        };
        log.seek(SeekFrom::Start(read.bytes))?;
        let mut text = String::new();
        log.read_to_string(&mut text)?;
        for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
            read.bytes += line.len() as u64;
            read.lines.extend(parse(line));
        }
        Ok(())
    }
}

/// The part of the log that was read so far.
#[derive(Debug, Default)]
pub(super) struct Lines {
    pub(super) lines: Vec<Line>,
    bytes: u64,
}

/// Returns the time on a clock that all processes of the machine share.
pub(super) fn uptime() -> Duration {
    SystemClock.now() - Moment::ZERO
}

/// Parses a complete line.
fn parse(line: &str) -> Option<Line> {
    let mut words = line.strip_suffix('\n')?.split(' ');
    let at = Duration::from_micros(words.next()?.parse().ok()?);
    let pid = words.next()?.parse().ok()?;
    let word = words.next()?;
    let note = NOTES.iter().find(|(_, known)| *known == word)?.0;
    Some(Line { at, pid, note, token: words.next()?.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_token_is_refused_and_every_line_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let log = SharedLog::new(dir.path());
        log.note(Note::Acquired, FencingToken::new(2)).unwrap();
        for token in [2, 3, 2, 3] {
            log.write(FencingToken::new(token)).unwrap();
        }
        let mut read = Lines::default();
        log.read_new(&mut read).unwrap();
        log.read_new(&mut read).unwrap();
        let notes: Vec<_> = read.lines.iter().map(|line| (line.note, line.token)).collect();
        let wanted =
            [(Note::Acquired, 2), (Note::Wrote, 2), (Note::Wrote, 3), (Note::Refused, 2), (Note::Wrote, 3)];
        assert_eq!(notes, wanted);
    }

    #[test]
    fn incomplete_line_is_ignored() {
        assert_eq!(parse("12 34 acquired 5"), None);
        let line = parse("12 34 acquired 5\n").unwrap();
        assert_eq!((line.at, line.pid, line.token), (Duration::from_micros(12), 34, 5));
    }
}
