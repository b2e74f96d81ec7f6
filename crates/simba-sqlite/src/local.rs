//! Which file systems a mutex may live on: those of one machine, by name. A file that two kernels share would
//! have two clocks and two owners.

use std::path::Path;

use simba_core::{Error, ErrorKind, Result};

use crate::machine;

/// File systems that one kernel has to itself, by its number for them.
const LOCAL: &[(u64, &str)] = &[
    (0xef53, "ext2/ext3/ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683e, "btrfs"),
    (0x2fc1_2fc1, "zfs"),
    (0xf2f5_2010, "f2fs"),
    (0xca45_1a4e, "bcachefs"),
    (0x3153_464a, "jfs"),
    (0x5265_4973, "reiserfs"),
    (0x3434, "nilfs2"),
    (0x2405_1905, "ubifs"),
    (0x0102_1994, "tmpfs"),
    (0x8584_58f6, "ramfs"),
    (0x794c_7630, "overlayfs"),
];

/// Names for those that people meet and that are refused; all others are, too.
const REFUSED: &[(u64, &str)] = &[
    (0x6969, "nfs"),
    (0xff53_4d42, "cifs"),
    (0xfe53_4d42, "smb3"),
    (0x517b, "smb"),
    (0x6573_5546, "fuse"),
    (0x0102_1997, "9p"),
    (0x00c3_6400, "ceph"),
    (0x5346_414f, "afs"),
    (0x0bd0_0bd0, "lustre"),
    (0x0116_1970, "gfs2"),
    (0x7461_636f, "ocfs2"),
    (0x786f_4256, "vboxsf"),
    (0xbacb_acbc, "vmhgfs"),
    (0xf15f, "ecryptfs"),
    (0x4d44, "fat"),
    (0x2011_bab0, "exfat"),
    (0x9fa0, "proc"),
    (0x6265_6572, "sysfs"),
];

/// Refuses a folder on anything but a local file system.
pub(crate) fn check(folder: &Path) -> Result<()> {
    let kind = machine::file_system(folder).map_err(|error| {
        let message = format!("cannot tell the file system of {}: choose another folder", folder.display());
        Error::new(ErrorKind::Config, message).with_source(error)
    })?;
    verdict(kind).map_err(|name| {
        Error::new(
            ErrorKind::Config,
            format!(
                "{} lies on the file system {name}, which is not known to belong to this machine alone: put \
                 the file on a local disk, or take a store with a server",
                folder.display()
            ),
        )
    })
}

/// Whether mutexes may live there; if not, the name of the file system.
fn verdict(kind: u64) -> std::result::Result<(), String> {
    if LOCAL.iter().any(|(local, _)| *local == kind) {
        return Ok(());
    }
    let known = REFUSED.iter().find(|(refused, _)| *refused == kind);
    Err(known.map_or_else(|| format!("{kind:#x}"), |(_, name)| format!("`{name}`")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_listed_is_local() {
        assert_eq!(verdict(0xef53), Ok(()));
        assert_eq!(verdict(0x6969), Err("`nfs`".into()));
        assert_eq!(verdict(0x6573_5546), Err("`fuse`".into()));
        assert_eq!(verdict(0x1234_5678), Err("0x12345678".into()), "unknown is refused");
    }

    #[test]
    fn nothing_is_on_both_lists() {
        for (kind, name) in LOCAL {
            assert!(REFUSED.iter().all(|(refused, _)| refused != kind), "{name}");
        }
    }

    #[test]
    fn a_real_file_system_that_is_none_of_ours_is_refused_by_its_name() {
        let error = check(Path::new("/proc")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("`proc`"), "{error}");
        assert!(check(&std::env::temp_dir()).is_ok());
    }
}
