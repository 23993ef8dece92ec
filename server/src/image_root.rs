//! Files of pictures that a chat file names: only inside one folder.

use std::fs::File;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use vision::PictureError;

/// A folder whose files may be named.
pub(crate) struct ImageRoot {
    /// As the caller wrote it.
    named: PathBuf,
    real: PathBuf,
}

impl ImageRoot {
    /// # Errors
    /// There is no such folder.
    pub(crate) fn open(named: &Path) -> Result<ImageRoot, String> {
        let wrong =
            |why: &str| format!("cannot use the folder {}: {why}; check --image-root", named.display());
        let real = named.canonicalize().map_err(|error| wrong(&error.to_string()))?;
        match real.is_dir() {
            true => Ok(ImageRoot { named: named.to_owned(), real }),
            false => Err(wrong("it is no folder")),
        }
    }

    /// The bytes of the file `name`, at most `most`.
    ///
    /// # Errors
    /// Names that lead out of the folder, by themselves or through links, and what is no file or too long.
    pub(crate) fn read(&self, name: &str, most: usize) -> Result<Vec<u8>, String> {
        let root = self.named.display();
        let inside = |part| matches!(part, Component::Normal(_) | Component::CurDir);
        if name.is_empty() || !Path::new(name).components().all(inside) {
            return Err(format!(
                "{name:?} is no name inside of {root} (--image-root); leave out / at the start and .."
            ));
        }
        let path = self.real.join(name);
        let real = path.canonicalize().map_err(|error| format!("cannot read {name} in {root}: {error}"))?;
        if !real.starts_with(&self.real) {
            return Err(format!("{name} is a link that leads out of {root} (--image-root)"));
        }
        read(&real, most)
    }
}

/// The bytes of a file, at most `most`.
pub(crate) fn read(path: &Path, most: usize) -> Result<Vec<u8>, String> {
    let wrong = |why: &str| format!("cannot read {}: {why}", path.display());
    // Before it is opened: a pipe would be waited for.
    let found = path.metadata().map_err(|error| wrong(&error.to_string()))?;
    if !found.is_file() {
        return Err(wrong("it is no file"));
    }
    let too_long = |bytes| wrong(&PictureError::Bytes { bytes, limit: most }.to_string());
    if found.len() > most as u64 {
        return Err(too_long(usize::try_from(found.len()).unwrap_or(usize::MAX)));
    }
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(most as u64 + 1).read_to_end(&mut bytes));
    read.map_err(|error| wrong(&error.to_string()))?;
    if bytes.len() > most { Err(too_long(bytes.len())) } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_files_inside_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir_all(root.join("sub")).unwrap();
        fs::write(root.join("a.png"), b"inside").unwrap();
        fs::write(dir.path().join("secret"), b"outside").unwrap();
        // A neighbour whose name begins like the folder's.
        fs::create_dir(dir.path().join("root2")).unwrap();
        fs::write(dir.path().join("root2/b.png"), b"outside").unwrap();
        symlink(dir.path().join("secret"), root.join("out")).unwrap();
        symlink("../secret", root.join("near")).unwrap();
        symlink(dir.path(), root.join("up")).unwrap();
        symlink("../root2", root.join("next")).unwrap();
        symlink("a.png", root.join("same")).unwrap();
        let at = ImageRoot::open(&root).unwrap();
        for name in ["a.png", "./a.png", "same"] {
            assert_eq!(at.read(name, 6).unwrap(), b"inside", "{name}");
        }
        let absolute = root.join("a.png");
        for (name, words) in [
            ("", "is no name inside"),
            ("..", "is no name inside"),
            ("../secret", "is no name inside"),
            ("sub/../a.png", "is no name inside"),
            ("/etc/passwd", "is no name inside"),
            (absolute.to_str().unwrap(), "is no name inside"),
            ("out", "leads out of"),
            ("near", "leads out of"),
            ("up/secret", "leads out of"),
            ("next/b.png", "leads out of"),
            ("absent.png", "cannot read absent.png"),
            ("sub", "no file"),
            ("a.png\0", "cannot read"),
        ] {
            let why = at.read(name, 6).unwrap_err();
            assert!(why.contains(words), "{name:?}: {why}");
        }
        assert!(at.read("a.png", 5).unwrap_err().contains("6 bytes; at most 5"));
        assert!(ImageRoot::open(&root.join("a.png")).is_err());
        assert!(ImageRoot::open(&root.join("absent")).is_err());
    }
}
